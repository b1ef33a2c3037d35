"""A kernel's arguments by their names."""


def by_name(variant, arguments):
    """The tensors among the arguments, the last of which is the stream; None for one that the call does not have."""
    return dict(zip(variant.names, arguments[:-1]))


def named(kind, variant, arguments):
    """The tensors that the fields of a NamedTuple name; None for one that the op or the call does not have."""
    given = by_name(variant, arguments)
    return kind(*(given.get(name) for name in kind._fields))
