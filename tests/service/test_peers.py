from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from service.peers import GONE_S, MAX_PEERS, MAX_STRANGERS, OTHER, Peers


class Shop:
    """A registry with one metric by peer, and a clock to turn."""

    def __init__(self) -> None:
        self.now = 0.0
        self.registry = CollectorRegistry(auto_describe=True)
        self.peers = Peers(lambda: self.now)
        self.registry.register(self.peers)
        self.sold = Counter("sold", "Things sold.", ["peer", "error"], registry=self.registry)
        self.peers.watch(self.sold)

    def visit(self, name: str, *, stranger: bool = False) -> str:
        label = self.peers.enter(name, stranger=stranger)
        self.sold.labels(label, "none").inc()
        self.sold.labels(label, "some").inc()
        self.peers.leave(label)
        return label

    @property
    def named(self) -> set[str]:
        return {each.labels["peer"] for family in self.registry.collect() for each in family.samples}


def test_series_of_a_peer_stay_while_it_is_in_use_and_for_some_time_after() -> None:
    shop = Shop()
    shop.visit("a")
    busy = shop.peers.enter("b")
    shop.sold.labels(busy, "none").inc()
    shop.now += GONE_S - 1
    assert shop.named == {"a", "b"}
    shop.now += 1
    assert shop.named == {"b"}
    shop.peers.leave(busy)
    shop.now += GONE_S - 1
    assert shop.named == {"b"}
    shop.visit("b")  # it came back in time
    shop.now += GONE_S - 1
    assert shop.registry.get_sample_value("sold_total", {"peer": "b", "error": "none"}) == 2
    shop.now += 1
    assert shop.named == set()


def test_weeks_of_restarts_under_new_names_stay_within_the_bound() -> None:
    shop = Shop()
    for restart in range(50):
        for worker in range(5):
            shop.visit(f"worker-{restart}-{worker}")
        shop.now += GONE_S / 10
        assert len(shop.named) <= MAX_PEERS + 1
    assert OTHER not in shop.named  # ten times five are within reach at a time
    assert len(shop.named) <= 50


def test_too_many_at_once_share_the_last_name() -> None:
    shop = Shop()
    assert [shop.visit(f"w{number}") for number in range(MAX_PEERS)] == [f"w{number}" for number in range(MAX_PEERS)]
    assert shop.visit("one more") == OTHER
    assert shop.visit("w3") == "w3"
    shop.now += GONE_S
    assert shop.visit("one more") == "one more"
    assert shop.named == {"one more", OTHER}


def test_strangers_do_not_take_the_place_of_those_who_are_known() -> None:
    shop = Shop()
    labels = [shop.visit(f"10.0.0.{number}", stranger=True) for number in range(100)]
    assert len(set(labels)) == MAX_STRANGERS + 1
    assert labels[-1] == OTHER
    for number in range(MAX_PEERS - MAX_STRANGERS):
        assert shop.visit(f"w{number}") == f"w{number}"
    assert shop.visit("one more") == OTHER


def test_a_peer_that_failed_is_told_once_and_until_it_does_well() -> None:
    peers = Peers()
    for failed, expected in ((False, False), (True, True), (None, False)):
        peers.leave(peers.enter("a"), failed=failed)
        assert peers.failed_before("a") is expected
        assert not peers.failed_before("a")
    peers.leave(peers.enter("a"), failed=True)
    peers.leave(peers.enter("a"))  # something else than a link
    assert peers.failed_before("a")
    assert not peers.failed_before("nobody")
