from shop.orders import Order

order = Order([("tea", 2), ("cup", 1)])
print(f"total: {order.total():.2f}")
