from shop.pricing import price

KINDS = ("tea", "cup", "pot")


class Order:
    def __init__(self, lines):
        for kind, _ in lines:
            if kind not in KINDS:
                raise ValueError(f"{kind!r} is not sold here")
        self.lines = lines

    def total(self):
        return sum(price(kind) * number for kind, number in self.lines)
