from shop.orders import KINDS

CURRENCY = "EUR"
PRICES = dict(zip(KINDS, (7.40, 9.00, 31.50)))


def price(kind):
    return PRICES[kind]
