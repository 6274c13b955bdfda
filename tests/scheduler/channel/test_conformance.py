"""The conformance suite against both hosts."""

import itertools

import pytest

from rlinf_plugins.scheduler.channel import Channel
from rlinf_plugins.testing.channel import ChannelConformance


class TestLocalChannel(ChannelConformance):
    @pytest.fixture
    def make_channel(self):
        return lambda config: Channel.local("local", config)


@pytest.mark.ray
@pytest.mark.slow
class TestRayChannel(ChannelConformance):
    numbers = itertools.count()

    @pytest.fixture
    def make_channel(self, ray_session):
        return lambda config: Channel.create(f"conformance-{next(self.numbers)}", config)
