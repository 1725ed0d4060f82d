def behaviour(a, b, v):
    return a, b


def staleness(b, v):
    return {}
