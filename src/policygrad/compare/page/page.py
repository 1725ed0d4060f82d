def page(found):
    return ""
