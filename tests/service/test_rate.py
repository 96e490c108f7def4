from service.rate import Rate


def test_a_rate_is_of_the_last_whole_interval_whoever_asks():
    now = 100.0
    rate = Rate(interval_s=2.0, clock=lambda: now)
    assert rate.update(5) == 0.0  # no interval has passed
    now = 104.0
    assert rate.update(40) == 10.0
    now = 105.0
    assert rate.update(1000) == 10.0  # another router asks meanwhile
    now = 106.0
    assert rate.update(1000) == 480.0
    now = 108.0
    assert rate.update(1000) == 0.0
