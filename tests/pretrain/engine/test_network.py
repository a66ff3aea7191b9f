"""The network interface that gloo uses."""

import socket
from types import SimpleNamespace

import pytest

from pretrain.engine import network

SEVERAL = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}


@pytest.fixture
def machine(monkeypatch):
    """A machine whose name is a local address, with eth0 to 10.x and eth1 to the default route."""
    cards = {"lo": "127.0.0.1", "eth0": "10.0.0.2", "eth1": "192.168.0.7"}
    found = {name: [SimpleNamespace(address=address)] for name, address in cards.items()}
    monkeypatch.setattr(network.psutil, "net_if_addrs", lambda: found)
    routes = {"10.0.0.1": "10.0.0.2", "192.0.2.1": "192.168.0.7"}
    monkeypatch.setattr(network, "_address_towards", lambda to: routes.get(to, "127.0.0.1"))
    monkeypatch.setattr(network, "_address", lambda name: "127.0.1.1")
    return monkeypatch


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "eth0"),
        ({"MASTER_ADDR": "this-machine"}, "eth1"),
        ({"GLOO_SOCKET_IFNAME": "eth2"}, None),
        ({"LOCAL_WORLD_SIZE": "4"}, None),
    ],
)
def test_a_machine_whose_name_is_a_local_address_tells_gloo_its_interface(
    machine, changed, expected
):
    found = network.gloo_interface({**SEVERAL, **changed})
    assert found == ({"GLOO_SOCKET_IFNAME": expected} if expected else {})


def test_a_name_with_an_address_of_its_own_is_left_alone(machine):
    machine.setattr(network, "_address", lambda name: "10.0.0.2")
    assert network.gloo_interface(SEVERAL) == {}


def test_an_interface_that_cannot_be_told_is_not_guessed(machine):
    machine.setattr(network, "_address_towards", lambda to: "127.0.0.1")
    assert network.gloo_interface(SEVERAL) == {}


def test_the_address_towards_this_machine_is_local():
    assert network._address_towards("127.0.0.1") == "127.0.0.1"
    assert network._address("localhost") == "127.0.0.1"
    assert network._address_towards(socket.gethostname()) != ""
