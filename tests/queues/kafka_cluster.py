"""
A Kafka cluster for tests: the brokers that librdkafka carries, on ports of this machine, and what can be done to them.

It speaks Kafka's protocol over TCP, groups, idempotent producers and leader changes included, keeps what it
is given in memory, and lets a test take a broker down, bring it back and choose its next answers: what a real broker
does only when it is in trouble.  Its functions are not among those that Python sees, so they are called in C.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import confluent_kafka
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

# Numbers of requests in Kafka's protocol.
PRODUCE, OFFSET_COMMIT = 0, 8
# Its numbers of errors.
UNKNOWN_TOPIC, MESSAGE_TOO_LARGE, REBALANCE_IN_PROGRESS, TOPIC_AUTHORIZATION_FAILED, UNSUPPORTED = 3, 10, 27, 29, 43


@cache
def library() -> ctypes.CDLL:
    """The very library that confluent_kafka has loaded."""
    maps = Path("/proc/self/maps").read_text()
    found = re.search(r"\S*/librdkafka[^/\s]*\.so\S*", maps)
    assert found, f"confluent_kafka {confluent_kafka.__version__} has loaded no librdkafka"
    lib = ctypes.CDLL(found[0])
    pointer, string, integer = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    for name, result, *arguments in (
        ("rd_kafka_conf_new", pointer),
        ("rd_kafka_conf_set", integer, pointer, string, string, string, ctypes.c_size_t),
        ("rd_kafka_new", pointer, integer, pointer, string, ctypes.c_size_t),
        ("rd_kafka_destroy", None, pointer),
        ("rd_kafka_mock_cluster_new", pointer, pointer, integer),
        ("rd_kafka_mock_cluster_destroy", None, pointer),
        ("rd_kafka_mock_cluster_bootstraps", string, pointer),
        ("rd_kafka_mock_topic_create", integer, pointer, string, integer, integer),
        ("rd_kafka_mock_topic_set_error", None, pointer, string, integer),
        ("rd_kafka_mock_broker_set_down", integer, pointer, ctypes.c_int32),
        ("rd_kafka_mock_broker_set_up", integer, pointer, ctypes.c_int32),
        ("rd_kafka_mock_broker_set_rtt", integer, pointer, ctypes.c_int32, integer),
        ("rd_kafka_mock_partition_set_leader", integer, pointer, string, ctypes.c_int32, ctypes.c_int32),
        ("rd_kafka_mock_group_initial_rebalance_delay_ms", None, pointer, ctypes.c_int32),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class Kafka:
    """So many brokers, numbered from 1, and no topic but those that are made."""

    def __init__(self, brokers: int = 1) -> None:
        lib = library()
        problem = ctypes.create_string_buffer(512)
        conf = lib.rd_kafka_conf_new()
        lib.rd_kafka_conf_set(conf, b"log_level", b"0", problem, len(problem))
        self._handle = lib.rd_kafka_new(0, conf, problem, len(problem))
        assert self._handle, problem.value
        self._cluster = lib.rd_kafka_mock_cluster_new(self._handle, brokers)
        assert self._cluster
        self.brokers = range(1, brokers + 1)
        self.servers: str = lib.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()
        # A real one waits for further members before it gives out partitions.
        lib.rd_kafka_mock_group_initial_rebalance_delay_ms(self._cluster, 100)

    def topic(self, name: str, partitions: int = 1) -> str:
        assert not library().rd_kafka_mock_topic_create(self._cluster, name.encode(), partitions, len(self.brokers))
        return name

    def url(self, topic: str, **options: object) -> str:
        query = "&".join(f"{name.replace('__', '.')}={value}" for name, value in options.items())
        return f"kafka://{self.servers}/{topic}" + (f"?{query}" if query else "")

    def down(self) -> None:
        """Every broker is gone: its connections are cut, its port refuses."""
        for broker in self.brokers:
            assert not library().rd_kafka_mock_broker_set_down(self._cluster, broker)

    def up(self) -> None:
        for broker in self.brokers:
            assert not library().rd_kafka_mock_broker_set_up(self._cluster, broker)

    def slow(self, seconds: float) -> None:
        """Each answer takes so long."""
        for broker in self.brokers:
            assert not library().rd_kafka_mock_broker_set_rtt(self._cluster, broker, int(seconds * 1000))

    def topic_error(self, topic: str, error: int) -> None:
        library().rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), error)

    def records(self, topic: str, partitions: int = 1) -> list[confluent_kafka.Message]:
        """All that is in a topic now, partition by partition."""
        reader = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": "past pgreaper"})
        try:
            found: list[confluent_kafka.Message] = []
            for number in range(partitions):
                where = confluent_kafka.TopicPartition(topic, number, 0)
                end = reader.get_watermark_offsets(where, timeout=10)[1]
                reader.assign([where])
                for _ in range(end):
                    record = reader.poll(10)
                    assert record is not None
                    assert record.error() is None
                    found.append(record)
            return found
        finally:
            reader.close()

    def write(self, topic: str, *bodies: bytes, partition: int = 0) -> None:
        """Put messages into a partition."""
        writer = confluent_kafka.Producer({"bootstrap.servers": self.servers})
        for body in bodies:
            writer.produce(topic, body, key=b"key of " + body, headers=[("origin", b"tests")], partition=partition)
        assert writer.flush(10) == 0

    def committed(self, topic: str, partition: int = 0, *, group: str = "listeners") -> int | None:
        """The offset that a group has committed."""
        reader = confluent_kafka.Consumer({"bootstrap.servers": self.servers, "group.id": group})
        try:
            told = reader.committed([confluent_kafka.TopicPartition(topic, partition)], timeout=10)[0]
            return told.offset if told.offset >= 0 else None
        finally:
            reader.close()

    def answer(self, request: int, *errors: int) -> None:
        """The next answers to this kind of request are these errors."""
        push: Any = library().rd_kafka_mock_push_request_errors
        push.restype = None
        arguments = [ctypes.c_void_p(self._cluster), ctypes.c_int16(request), ctypes.c_size_t(len(errors))]
        push(*arguments, *(ctypes.c_int(error) for error in errors))

    def close(self) -> None:
        library().rd_kafka_mock_cluster_destroy(self._cluster)
        library().rd_kafka_destroy(self._handle)


@pytest.fixture
def kafka() -> Iterator[Kafka]:
    """One broker of this test's own, which costs a tenth of a second."""
    cluster = Kafka()
    yield cluster
    cluster.close()
