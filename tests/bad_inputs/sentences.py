"""What a refusal looks like: one ValueError, one sentence that names the mistake."""


def mistake(make):
    """The error something ends in, None where it ends well."""
    try:
        make()
    except ValueError as error:
        return error


def assert_refusal(make, *mentions):
    """The mistake gives one sentence, and the sentence names what it is about."""
    error = mistake(make)
    assert error is not None, "nothing was refused"
    assert_one_sentence(error)
    for mention in mentions:
        assert str(mention) in str(error)


def assert_one_sentence(error):
    assert type(error) is ValueError
    assert str(error).strip()
    assert "\n" not in str(error)
    assert len(str(error)) < 700  # the longest ones list the names of a group
