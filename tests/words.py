"""What tests look for in a message: its kind, and the names and values that are specific to it."""


def missing(message, *words):
    """The words that are missing from the message."""
    return [word for word in words if word not in message]
