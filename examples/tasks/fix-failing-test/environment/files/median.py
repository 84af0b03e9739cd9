def median(values):
    """The middle of the values; of an even number of them the mean of the two in the middle."""
    if not values:
        raise ValueError("median of nothing")
    middle = len(values) // 2
    if len(values) % 2:
        return values[middle]
    return (values[middle] + values[middle + 1]) / 2
