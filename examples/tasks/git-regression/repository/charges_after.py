"""What a parcel costs, in cents."""

FIRST = {"home": 390, "near": 740, "far": 1480}
STEP_GRAMS = 500
STEP_PRICE = 85
HEAVIEST_GRAMS = 20_000


def steps(grams):
    """How many steps of weight a parcel has."""
    return grams // STEP_GRAMS


def charge(grams, zone, insured=False):
    """The price of one parcel; raises ValueError for one that is not carried."""
    if not 0 < grams < HEAVIEST_GRAMS:
        raise ValueError(f"{grams} g are not carried")
    price = FIRST[zone] + STEP_PRICE * steps(grams)
    if insured:
        price += min(150, price // 10)
    return price
