"""The way to a broker over a Unix socket: conformance, what happens when the connection is lost, and slow brokers."""

import asyncio
import os
import stat
import threading
import time
from pathlib import Path

import pytest

from rlinf_plugins.core.errors import BrokerUnreachableError, ChannelError
from rlinf_plugins.scheduler.channel import Channel, ChannelConfig
from rlinf_plugins.scheduler.channel.host import Host
from rlinf_plugins.scheduler.channel.link import FutureReply
from rlinf_plugins.scheduler.channel.sockets import Port, dial
from rlinf_plugins.testing.channel import ChannelConformance


class Served:
    """A port on a loop of its own thread."""

    def __init__(self, call=None):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.port = Port(call or self.call)
        self.path = self.do(self.port.open())

    def do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    async def call(self, operation, arguments):
        return await self.host.call(operation, arguments)

    def hang_up(self):
        """End every connection, as the broker's death does."""

        async def end():
            for transport in [t for t in self.loop._transports.values() if t is not None]:
                transport.abort()

        self.do(end())
        self.do(self.port.close())


class SocketLink:
    """A link with nothing but the socket."""

    name = "socket"
    node = "here"

    def __init__(self, config):
        self.served = Served()
        self.served.host = self.served.do(_host(config))

    def submit(self, operation, arguments):
        line = dial(self.served.path)
        if line is None:
            raise BrokerUnreachableError("nobody listens")
        return FutureReply(line.submit(operation, arguments, _fail), self.name)

    def destroy(self):
        self.served.loop.call_soon_threadsafe(self.served.host.shut_down)
        self.served.do(self.served.port.close())


async def _host(config):
    return Host("socket", config)


def _fail(request):
    request.future.set_exception(BrokerUnreachableError("lost"))


class TestSocketChannel(ChannelConformance):
    @pytest.fixture
    def make_channel(self):
        return lambda config: Channel(SocketLink(config))


@pytest.fixture
def echo():
    """A port that answers with the arguments, after as many seconds as the operation says."""

    async def call(operation, arguments):
        await asyncio.sleep(float(operation))
        return arguments

    served = Served(call)
    yield served
    served.do(served.port.close())


def test_answers_come_in_any_order(echo):
    line = dial(echo.path)
    slow = line.submit("0.3", ("slow",), _fail)
    quick = [line.submit("0", (number,), _fail) for number in range(100)]
    assert [future.result(30) for future in quick] == [(number,) for number in range(100)]
    assert not slow.done()
    assert slow.result(30) == ("slow",)


def test_messages_larger_than_the_sockets_buffer_arrive(echo):
    line = dial(echo.path)
    sent = [bytes([number]) * (3 << 20) for number in range(8)]
    futures = [line.submit("0", (data,), _fail) for data in sent]
    assert [future.result(60)[0] for future in futures] == sent


def test_sending_to_a_broker_that_does_not_read_does_not_block(echo):
    line = dial(echo.path)
    release = threading.Event()
    echo.loop.call_soon_threadsafe(release.wait)
    start = time.monotonic()
    futures = [line.submit("0", (b"x" * 500_000,), _fail) for _ in range(20)]
    assert time.monotonic() - start < 5
    assert not any(future.done() for future in futures)
    release.set()
    assert all(len(future.result(60)[0]) == 500_000 for future in futures)


def test_what_is_unanswered_when_the_connection_is_lost_is_taken_over(echo):
    line = dial(echo.path)
    taken = []

    def take_over(request):
        taken.append(request.operation)
        request.future.set_result("elsewhere")

    futures = [line.submit("60", (), take_over) for _ in range(3)]
    assert line.submit("0", (), take_over).result(30) == ()
    echo.hang_up()
    assert [future.result(30) for future in futures] == ["elsewhere"] * 3
    assert line.submit("0", (), take_over).result(30) == "elsewhere"
    assert taken == ["60"] * 3 + ["0"]
    assert dial(echo.path) is None


def test_a_process_has_one_line_to_a_broker(echo):
    assert dial(echo.path) is dial(echo.path)
    assert dial("/nowhere/s") is None


class _Reluctant:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("not here")


def test_a_request_the_broker_cannot_read_is_answered(echo):
    line = dial(echo.path)
    answer = line.submit("0", (_Reluctant(),), _fail).result(30)
    assert isinstance(answer, ChannelError)
    assert "not here" in str(answer)
    assert line.submit("0", (1,), _fail).result(30) == (1,)


def test_nobody_else_can_reach_the_socket(echo):
    folder = Path(echo.path).parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder.stat().st_uid == os.getuid()
    echo.do(echo.port.close())
    assert not folder.exists()


def test_a_get_that_waits_ends_when_the_broker_is_lost():
    link = SocketLink(ChannelConfig())
    channel = Channel(link)
    consumer = channel.consumer()
    got = []
    thread = threading.Thread(target=lambda: got.append(_outcome(consumer)))
    thread.start()
    while channel.stats()["waiting_gets"] == 0:
        time.sleep(0.01)
    link.served.hang_up()
    thread.join(30)
    assert isinstance(got[0], BrokerUnreachableError)


def _outcome(consumer):
    try:
        return consumer.get(timeout=60).value
    except BrokerUnreachableError as error:
        return error
