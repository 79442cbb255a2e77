"""What tests look for in a message: its kind, and the names and values that only this message has."""


def missing(message, *words):
    """Those of the words that are not in the message."""
    return [word for word in words if word not in message]
