"""What editors are told of `ctxext.patch`."""

from ctxext import methods
from experiments.stubs import __main__ as stubs


def test_the_stub_is_what_the_registry_says():
    """After a change of a method: python -m experiments.stubs"""
    assert stubs.STUB.read_text() == stubs.stub()
    for method in methods.all_methods().values():
        assert f'Literal["{method.name}"]' in stubs.stub()
