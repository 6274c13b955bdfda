"""Processes of the soak: a broker, producers and consumers that can be killed or stopped at named failpoints.

Run as ``python soak_members.py ROLE ...``; the test starts them and judges what they wrote.
"""

import asyncio
import pickle
import socket
import struct
import sys
import threading
from concurrent.futures import Future

from rlinf_plugins.core.errors import BrokerUnreachableError, EndOfStreamError, StaleDeliveryError
from rlinf_plugins.scheduler.channel.channel import Channel
from rlinf_plugins.scheduler.channel.config import ChannelConfig, JournalConfig
from rlinf_plugins.scheduler.channel.host import Host
from rlinf_plugins.scheduler.channel.link import FutureReply
from rlinf_plugins.scheduler.channel.wire import Put

_HEAD = struct.Struct("<QI")


class SocketLink:
    """Reaches the soak's broker over a Unix socket, so that no Ray process can be hurt; sends again what it lost."""

    name = "soak"
    node = "soak"

    def __init__(self, path):
        self._path = path
        self._lock = threading.Lock()
        self._pending = {}
        self._number = 0
        self._socket = None
        threading.Thread(target=self._read, daemon=True).start()

    def submit(self, operation, arguments):
        future = Future()
        with self._lock:
            self._number += 1
            body = pickle.dumps((operation, arguments))
            self._pending[self._number] = (future, body)
            self._send(self._number, body)
        return FutureReply(future, self.name)

    def _send(self, number, body):
        if self._socket is not None:
            try:
                self._socket.sendall(_HEAD.pack(number, len(body)) + body)
            except OSError:
                self._socket = None  # the reader connects again and repeats what is pending

    def _read(self):
        while True:
            stream = self._connect()
            try:
                while True:
                    number, length = _HEAD.unpack(_exactly(stream, _HEAD.size))
                    answer = pickle.loads(_exactly(stream, length))
                    with self._lock:
                        future, _ = self._pending.pop(number, (None, None))
                    if future is not None:
                        future.set_result(answer)
            except (OSError, EOFError):
                continue

    def _connect(self):
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(self._path)
            except OSError:
                threading.Event().wait(0.05)
                continue
            with self._lock:
                self._socket = stream
                for number in sorted(self._pending):
                    self._send(number, self._pending[number][1])
            return stream


def _exactly(stream, size):
    data = bytearray()
    while len(data) < size:
        part = stream.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def broker(path, journal, lease):
    config = ChannelConfig(
        max_items=2000,
        lease_seconds=float(lease),
        inline_bytes=2000,
        journal=JournalConfig(directory=journal, compact_bytes=4 << 20) if journal else None,
    )

    async def serve():
        host = Host("soak", config)

        async def client(reader, writer):
            async def answer(number, body):
                reply = pickle.dumps(await host.call(*pickle.loads(body)))
                writer.write(_HEAD.pack(number, len(reply)) + reply)

            tasks = set()
            try:
                while True:
                    number, length = _HEAD.unpack(await reader.readexactly(_HEAD.size))
                    task = asyncio.ensure_future(answer(number, await reader.readexactly(length)))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        server = await asyncio.start_unix_server(client, path, limit=1 << 24)
        await server.serve_forever()

    asyncio.run(serve())


def produce(path, name, first, last, output):
    """Put numbers, and write down which were confirmed; after a restart go on from there."""
    producer = Channel(SocketLink(path)).producer(name)
    with open(output, "a+", buffering=1) as file:
        file.seek(0)
        confirmed = [int(line.split()[1]) + 1 for line in file]
        for start in range(max([int(first), *confirmed]), int(last), 50):
            numbers = range(start, min(start + 50, int(last)))
            # Every fiftieth item is large enough for a segment.
            producer.put_many([Put((n, b"x" * (5000 if n % 50 == 0 else 10)), key=n % 4) for n in numbers])
            file.write(f"{numbers[0]} {numbers[-1]}\n")


def consume(path, name, key, output):
    """Write down what was committed, once the channel has said so."""
    consumer = Channel(SocketLink(path)).consumer(name)
    with open(output, "a", buffering=1) as file:
        while True:
            try:
                delivery = consumer.get_batch(64, fill=False, key=int(key))
                delivery.ack()
            except StaleDeliveryError:
                continue
            except (EndOfStreamError, BrokerUnreachableError):
                return
            life = delivery.number >> 40  # of the broker: a new one counts deliveries from the start
            lines = [
                f"{i.producer} {i.epoch} {i.seq} {v[0]} {i.attempts} {life}\n"
                for i, v in zip(delivery.items, delivery.values, strict=True)
            ]
            file.write("".join(lines))


if __name__ == "__main__":
    {"broker": broker, "produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:])
