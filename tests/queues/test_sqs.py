"""SQS as a sink and a source: against moto's server, and a way to it that refuses, cuts and delays."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from pgreaper import queues
from pgreaper.errors import InvalidInput
from pgreaper.queues import Refusal, Sent, Trouble
from tests.queues.aws import SECRET, Aws, Front
from tests.queues.broker import free_port, wait_until
from tests.queues.conftest import message, messages

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgreaper.queues import Received, Sink, Source


@pytest.fixture
def open_sink(aws: Aws) -> Iterator[Callable[[str], Sink]]:
    """A function that opens a sink for a queue."""
    opened: list[Sink] = []

    def open_sink(queue: str) -> Sink:
        opened.append(queues.sink(aws.url(queue)))
        return opened[-1]

    yield open_sink
    for sink in opened:
        sink.close()


@pytest.fixture
def open_source(aws: Aws) -> Iterator[Callable[..., Source]]:
    """A function that opens a source, which hides what it receives for a minute."""
    opened: list[Source] = []

    def open_source(queue: str, *, visibility: float = 60) -> Source:
        opened.append(queues.source(aws.url(queue), visibility=visibility))
        return opened[-1]

    yield open_source
    for source in opened:
        source.close()


def identities(found: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["MessageAttributes"]["idempotency-key"]["StringValue"] for one in found)


def bodies(received: list[Received]) -> list[bytes]:
    return [one.body for one in received]


def receive(source: Source, n: int) -> list[Received]:
    """So many messages, in as many calls as it takes."""
    found: list[Received] = []

    def is_complete() -> bool:
        found.extend(source.receive(n - len(found), wait=1))
        return len(found) == n

    wait_until(is_complete)
    return found


# -- events out


def test_an_event_has_its_identity_and_its_headers(aws, open_sink):
    """What a consumer gets; a character that XML has no room for arrives as JSON spells it, or percent-encoded."""
    queue = aws.queue()
    odd = queues.Message(b'{"key": "\xef\xbf\xbf"}', "k", "holds/k/1", {"policy": "h\x01olds", "content-type": "x"})
    assert open_sink(queue).send([message(1), odd], timeout=10) == Sent(frozenset({0, 1}), {})
    first, second = sorted(aws.drain(queue), key=lambda one: len(one["Body"]), reverse=True)
    assert first["Body"].encode() == message(1).body
    assert {name: value["StringValue"] for name, value in first["MessageAttributes"].items()} == {
        "content-type": "application/json",
        "policy": "holds",
        "idempotency-key": message(1).identity,
    }
    assert second["Body"] == '{"key": "\\uffff"}'
    assert second["MessageAttributes"]["policy"]["StringValue"] == "h%01olds"


def test_a_fifo_queue_groups_by_key_and_knows_duplicates(aws, open_sink):
    """The group is the key; the identity keeps a second sending out.  What SQS would not take is a digest."""
    queue = aws.queue(fifo=True)
    sink = open_sink(queue)
    given = [message(1, key="a"), message(2, key="a"), message(3, key="ü b"), message(4, key="c" * 200)]
    assert len(sink.send(given, timeout=10).confirmed) == 4
    assert len(sink.send(given, timeout=10).confirmed) == 4
    found = aws.drain(queue)
    assert identities(found) == Counter(one.identity for one in given)
    groups = {one["Body"].encode(): one["Attributes"]["MessageGroupId"] for one in found}
    assert groups[given[0].body] == groups[given[1].body] == "a"
    assert groups[given[2].body].startswith("sha256:")
    assert len({groups[one.body] for one in given}) == 3
    assert [one["Body"].encode() for one in found if one["Attributes"]["MessageGroupId"] == "a"] == [
        given[0].body,
        given[1].body,
    ]


def test_a_call_has_ten_messages_and_a_mebibyte(aws, open_sink):
    """Neither more of the one nor of the other."""
    queue = aws.queue()
    sink = open_sink(queue)
    assert len(sink.send(messages(25), timeout=10).confirmed) == 25
    assert sorted(len(call["Entries"]) for call in aws.front.asked("SendMessageBatch")) == [5, 10, 10]
    aws.front.calls.clear()
    large = [message(n, body=b'"%s"' % (b"x" * 400_000)) for n in range(5)]
    assert len(sink.send(large, timeout=20).confirmed) == 5
    assert sorted(len(call["Entries"]) for call in aws.front.asked("SendMessageBatch")) == [1, 2, 2]
    assert len(aws.drain(queue)) == 30


def test_an_event_that_is_too_large_is_refused_without_a_call(aws, open_sink):
    """Its attributes count, and the queue's own limit does."""
    sink = open_sink(aws.queue())
    assert sink.send([message(1, body=b"x" * 1024 * 1024)], timeout=10) == Sent(
        frozenset(), {0: Refusal("TooLarge", transient=False)}
    )
    sink = open_sink(aws.queue(MaximumMessageSize=2000))
    assert sink.send([message(1, body=b"x" * 2000), message(2)], timeout=10) == Sent(
        frozenset({1}), {0: Refusal("TooLarge", transient=False)}
    )
    assert [len(call["Entries"]) for call in aws.front.asked("SendMessageBatch")] == [1]


def refuse(front: Front, codes: dict[str, tuple[str, bool]], *, times: int = 1) -> None:
    """In the next call with messages, SQS refuses those of these keys, each with a code and whose fault it is."""
    left = [times]

    def before(operation: str, asked: dict[str, Any]) -> Any:
        if operation != "SendMessageBatch" or not left[0]:
            return None
        left[0] -= 1
        entries = {json.loads(entry["MessageBody"])["key"]: entry for entry in asked["Entries"]}
        rest = {**asked, "Entries": [entry for key, entry in entries.items() if key not in codes]}
        answer: dict[str, Any] = {"Successful": []}
        if rest["Entries"]:
            headers = {"X-Amz-Target": "AmazonSQS.SendMessageBatch", "Content-Type": "application/x-amz-json-1.0"}
            answer = front.pass_on(front.port, {**headers, **CREDENTIAL}, json.dumps(rest).encode())[1]
        answer["Failed"] = [
            {"Id": entries[key]["Id"], "Code": code, "SenderFault": fault}
            for key, (code, fault) in codes.items()
            if key in entries
        ]
        return 200, answer

    front.before = before


# moto finds the region in it.
CREDENTIAL = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=tests/20260101/eu-central-1/sqs/aws4_request, SignedHeaders=host,"
    " Signature=0"
}


def test_of_a_batch_some_are_taken_and_some_are_not(aws, open_sink):
    """Each entry has its own answer: never, try again, or SQS's own trouble."""
    queue = aws.queue()
    codes = {"1": ("InvalidMessageContents", True), "2": ("SomethingNew", True), "3": ("InternalError", False)}
    refuse(aws.front, codes)
    assert open_sink(queue).send(messages(5), timeout=10) == Sent(
        frozenset({0, 4}),
        {1: Refusal("InvalidMessageContents", transient=False), 2: Refusal("SomethingNew", transient=True)},
        "InternalError",
    )
    assert len(aws.drain(queue)) == 2


def test_a_batch_that_is_refused_as_a_whole_is_tried_one_by_one(aws, open_sink):
    """One message in it is too long for the service: the others go out."""
    queue = aws.queue()

    def before(operation: str, asked: dict[str, Any]) -> Any:
        if operation == "SendMessageBatch" and any('"1"' in entry["MessageBody"] for entry in asked["Entries"]):
            return 400, {"__type": "com.amazonaws.sqs#BatchRequestTooLong", "message": "secret"}
        return None

    aws.front.before = before
    assert open_sink(queue).send(messages(3), timeout=10) == Sent(
        frozenset({0, 2}), {1: Refusal("TooLarge", transient=False)}
    )


@pytest.mark.parametrize("fifo", [False, True])
def test_after_an_event_that_waits_no_later_one_of_its_key_goes_out(aws, open_sink, fifo):
    """It would overtake it."""
    queue = aws.queue(fifo=fifo)
    refuse(aws.front, {"a": ("SomethingNew", True)})
    given = [message(1, key="a"), message(2, key="b"), message(3, key="a")]
    sent = open_sink(queue).send(given, timeout=10)
    assert sent == Sent(frozenset({1}), {0: Refusal("SomethingNew", transient=True)})
    assert identities(aws.drain(queue)) == Counter([given[1].identity])


def test_throttling_is_trouble_and_refuses_nothing(aws, open_sink):
    """Nothing is charged to an event, and the next call goes on."""
    queue = aws.queue()
    sink = open_sink(queue)
    aws.front.before = lambda operation, _: (
        (400, {"__type": "com.amazonaws.sqs#RequestThrottled", "message": "secret"})
        if operation == "SendMessageBatch"
        else None
    )
    assert sink.send(messages(25), timeout=10) == Sent(frozenset(), {}, "RequestThrottled")
    aws.front.before = lambda operation, _: (503, {}) if operation == "SendMessageBatch" else None
    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, "HTTP 503")
    aws.front.before = lambda *_: None
    assert len(sink.send(messages(25), timeout=10).confirmed) == 25


@pytest.mark.parametrize(("fifo", "copies"), [(False, 2), (True, 1)])
def test_a_connection_that_is_cut_before_the_answer(aws, open_sink, fifo, copies):
    """The messages are there, and nobody knows: sent again, a duplicate has the same identity; FIFO has none."""
    queue = aws.queue(fifo=fifo)
    sink = open_sink(queue)
    aws.front.after = lambda operation, *_: Front.CUT if operation == "SendMessageBatch" else None
    assert sink.send(messages(3), timeout=10) == Sent(frozenset(), {}, "ConnectionClosedError")
    aws.front.after = lambda *_: None
    assert len(sink.send(messages(3), timeout=10).confirmed) == 3
    assert identities(aws.drain(queue)) == Counter({one.identity: copies for one in messages(3)})


def test_an_answer_that_does_not_come_in_time(aws, open_sink):
    """Told in time; and nothing more is sent before the late call is over, which may still bring its messages."""
    queue = aws.queue()
    sink = open_sink(queue)
    sink.send(messages(1, 5), timeout=10)
    released = threading.Event()
    aws.front.before = lambda operation, _: (released.wait(20), None)[1] if operation == "SendMessageBatch" else None
    began = time.monotonic()
    assert sink.send(messages(1), timeout=0.3) == Sent(frozenset(), {}, "Timeout")
    assert sink.send(messages(1, 1), timeout=0.3) == Sent(frozenset(), {}, "Timeout")
    assert 0.6 <= time.monotonic() - began < 3
    assert len(aws.front.asked("SendMessageBatch")) == 2
    released.set()
    assert len(sink.send(messages(1, 1), timeout=10).confirmed) == 1


def test_a_queue_that_does_not_exist_is_trouble_until_it_does(aws, open_sink):
    """Somebody makes it, and the events go out."""
    sink = open_sink("made-later")
    assert sink.send(messages(1), timeout=10) == Sent(frozenset(), {}, "QueueDoesNotExist")
    aws.queue(name="made-later")
    assert len(sink.send(messages(1), timeout=10).confirmed) == 1


# -- commands in


def test_commands_are_received_done_and_gone(aws, open_source):
    """More than one call has, with their attempts; what is done never comes again."""
    queue = aws.queue()
    aws.write(queue, *map(str, range(25)))
    source = open_source(queue)
    received = receive(source, 25)
    assert sorted(map(int, bodies(received))) == list(range(25))
    assert {one.attempt for one in received} == {1}
    assert aws.counts(queue) == (0, 25)
    source.done(received)
    assert aws.counts(queue) == (0, 0)
    # Several calls are under way at once, in no order.
    assert sorted(len(call["Entries"]) for call in aws.front.asked("DeleteMessageBatch")) == [5, 10, 10]


def test_no_more_than_the_limit(aws, open_source):
    """Neither in the first call nor in those beside it."""
    queue = aws.queue()
    aws.write(queue, *map(str, range(30)))
    source = open_source(queue)
    assert len(source.receive(3, wait=1)) == 3
    assert len(source.receive(22, wait=1)) == 22
    assert aws.counts(queue) == (5, 25)


@pytest.mark.parametrize("wait", [0.4, 1.5])
def test_receive_waits_as_long_as_it_was_told(aws, open_source, wait):
    """SQS counts whole seconds; the rest is waited for here."""
    source = open_source(aws.queue())
    source.receive(1, wait=0)
    began = time.monotonic()
    assert source.receive(10, wait=wait) == []
    assert wait <= time.monotonic() - began < wait + 1


def test_what_is_not_done_comes_again_and_counts(aws, open_source):
    """As after a crash: when its time is over, with the next attempt."""
    queue = aws.queue()
    aws.write(queue, "1")
    first, second = open_source(queue, visibility=1), open_source(queue)
    (lost,) = receive(first, 1)
    (again,) = receive(second, 1)
    assert (lost.attempt, again.attempt) == (1, 2)


@pytest.mark.parametrize(("seconds", "asked"), [(50.9, 50), (0.0, 0), (90_000.0, 43_198)])
def test_later_is_no_later_than_that(aws, open_source, seconds, asked):
    """SQS counts whole seconds, and twelve hours in all since a message came."""
    queue = aws.queue()
    aws.write(queue, "1")
    source = open_source(queue)
    (received,) = receive(source, 1)
    source.later(received, seconds=seconds)
    ((entry,),) = [call["Entries"] for call in aws.front.asked("ChangeMessageVisibilityBatch")]
    assert asked - 5 <= entry["VisibilityTimeout"] <= asked
    assert aws.counts(queue) == ((1, 0) if asked == 0 else (0, 1))


def test_what_is_due_within_the_second_waits_here(aws, open_source):
    """Through SQS it would come at once, again and again, and use up the budget of its redrive policy."""
    queue = aws.queue()
    aws.write(queue, "1")
    source = open_source(queue)
    (received,) = receive(source, 1)
    began = time.monotonic()
    source.later(received, seconds=0.5)
    (again,) = source.receive(10, wait=20)
    assert 0.5 <= time.monotonic() - began < 2
    assert (again.body, again.attempt) == (b"1", 2)
    source.done([again])
    assert aws.counts(queue) == (0, 0)


def test_a_rejected_command_uses_up_its_budget(aws, open_source):
    """At once, and the queue's own redrive policy takes it away."""
    dead = aws.queue()
    policy = json.dumps({"deadLetterTargetArn": aws.arn(dead), "maxReceiveCount": 3})
    queue = aws.queue(RedrivePolicy=policy)
    aws.write(queue, "no command")
    source = open_source(queue)
    for attempt in (1, 2, 3):
        (received,) = receive(source, 1)
        assert received.attempt == attempt
        source.reject(received, reason="Malformed")
    assert source.receive(1, wait=0) == []
    assert [one["Body"] for one in aws.drain(dead)] == ["no command"]


def test_without_a_redrive_policy_a_rejected_command_comes_less_and_less_often(aws, open_source):
    """It can go nowhere: it must not turn on the spot either."""
    queue = aws.queue()
    aws.write(queue, "no command")
    source = open_source(queue)
    (received,) = receive(source, 1)
    source.reject(received, reason="Malformed")
    source.reject(queues.Received(received.body, 5, received.handle), reason="Malformed")
    asked = [call["Entries"][0]["VisibilityTimeout"] for call in aws.front.asked("ChangeMessageVisibilityBatch")]
    assert asked == [2, 32]


def test_what_is_worked_on_is_kept(aws, open_source):
    """Ten a call, and nobody else gets them meanwhile."""
    queue = aws.queue()
    aws.write(queue, *map(str, range(12)))
    source = open_source(queue, visibility=2)
    received = receive(source, 12)
    source.keep(received, seconds=30)
    calls = [call["Entries"] for call in aws.front.asked("ChangeMessageVisibilityBatch")]
    assert sorted(map(len, calls)) == [2, 10]
    assert {entry["VisibilityTimeout"] for entries in calls for entry in entries} == {30}
    other = open_source(queue)
    assert other.receive(1, wait=3) == []
    source.done(received)
    assert aws.counts(queue) == (0, 0)


def test_a_message_that_is_not_ours_any_more_is_passed_over(aws, open_source):
    """Its receipt has expired: it comes again, and the others of the batch are acknowledged."""
    queue = aws.queue()
    aws.write(queue, "1", "2")
    source = open_source(queue)
    first, second = receive(source, 2)
    aws.front.after = lambda operation, asked, answer: (
        {
            "Successful": answer["Successful"][1:],
            "Failed": [{"Id": "0", "Code": "ReceiptHandleIsInvalid", "SenderFault": True}],
        }
        if operation == "DeleteMessageBatch"
        else None
    )
    source.done([first, second])
    assert len(aws.front.asked("DeleteMessageBatch")) == 1


def test_an_acknowledgement_that_sqs_does_not_take(aws, open_source):
    """Those that it refused are tried once more; then it is trouble, and they come again."""
    queue = aws.queue()
    aws.write(queue, *map(str, range(3)))
    source = open_source(queue)
    received = receive(source, 3)

    def after(operation: str, asked: dict[str, Any], answer: dict[str, Any]) -> Any:
        if operation != "DeleteMessageBatch":
            return None
        *_, last = asked["Entries"]
        failed = [{"Id": last["Id"], "Code": "InternalError", "SenderFault": False}]
        return {"Successful": answer["Successful"][:-1], "Failed": failed}

    aws.front.after = after
    with pytest.raises(Trouble, match=r"^InternalError$"):
        source.done(received)
    assert [len(call["Entries"]) for call in aws.front.asked("DeleteMessageBatch")] == [3, 1]


def test_close_gives_the_messages_back_at_once(aws, open_source):
    """What is neither done nor put off, and what waits here."""
    queue = aws.queue()
    aws.write(queue, *map(str, range(4)))
    source = open_source(queue)
    first, second, third, _ = receive(source, 4)
    source.done([first])
    source.later(second, seconds=100)
    source.later(third, seconds=0.9)
    source.close()
    source.close()
    assert aws.counts(queue) == (2, 1)


def test_sqs_that_does_not_answer_is_trouble(aws):
    """Nobody is there, the queue is not, or we may not: a name, and never what SQS has to say."""
    source = queues.source(f"sqs://none?endpoint=http://127.0.0.1:{free_port()}")
    with pytest.raises(Trouble, match=r"^EndpointConnectionError$"):
        source.receive(1, wait=0)
    source = queues.source(aws.url("none"))
    with pytest.raises(Trouble, match=r"^QueueDoesNotExist$"):
        source.receive(1, wait=0)
    aws.front.before = lambda *_: (403, {"__type": "AccessDeniedException", "message": "arn:aws:iam::1:user/secret"})
    with pytest.raises(Trouble, match=r"^AccessDeniedException$"):
        source.receive(1, wait=0)
    source.close()


# -- what is wrong with a URL or its surroundings


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("sqs://", "names no queue"),
        ("sqs://q/r", "names no queue"),
        ("sqs://q.fifa", "names no queue"),
        ("sqs://q?endpoint=localhost:9324", "has an endpoint that is no URL"),
        ("sqs://q?regoin=eu-west-1", "has an option regoin that does not exist"),
        ("sqs://key:pa55word@q", "has credentials in it"),
        ("https://sqs.eu-west-1.amazonaws.com/q", "names no queue of SQS"),
    ],
)
def test_a_url_that_cannot_be_is_refused_at_once(aws, url, what):
    """With the remedy, and without what may be a secret."""
    with pytest.raises(InvalidInput, match=what) as refused:
        queues.sink(url)
    assert refused.value.hint
    assert "pa55word" not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("changes", "what", "hint"),
    [
        ({"AWS_SECRET_ACCESS_KEY": None, "AWS_ACCESS_KEY_ID": None}, "no AWS credentials", "AWS_PROFILE"),
        ({"AWS_SECRET_ACCESS_KEY": None}, "cannot be used: PartialCredentialsError", "AWS_SECRET_ACCESS_KEY"),
        ({"AWS_PROFILE": "none"}, "AWS_PROFILE names a profile that does not exist", "AWS_PROFILE"),
        ({"AWS_REGION": None}, "names no AWS region", "region="),
    ],
)
def test_what_is_missing_is_said_at_once(aws, monkeypatch, changes, what, hint):
    """No waiting brings it: exit code 2, and how to go on."""
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInput, match=what) as refused:
        queues.sink("sqs://q")
    assert hint in (refused.value.hint or "")
    assert refused.value.exit_code == 2
    assert SECRET not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(
    ("host", "region", "endpoint"),
    [
        ("sqs.eu-west-1.amazonaws.com", "eu-west-1", "https://sqs.eu-west-1.amazonaws.com"),
        ("us-west-2.queue.amazonaws.com", "us-west-2", "https://sqs.us-west-2.amazonaws.com"),
        ("queue.amazonaws.com", "us-east-1", "https://sqs.us-east-1.amazonaws.com"),
        ("sqs.cn-north-1.amazonaws.com.cn", "cn-north-1", "https://sqs.cn-north-1.amazonaws.com.cn"),
        ("sqs-fips.us-east-1.amazonaws.com", "us-east-1", "https://sqs-fips.us-east-1.amazonaws.com"),
        ("vpce-1.sqs.eu-west-1.vpce.amazonaws.com", "eu-west-1", "https://vpce-1.sqs.eu-west-1.vpce.amazonaws.com"),
    ],
)
def test_the_queues_own_url_tells_its_region(aws, host, region, endpoint):
    """As the console shows it; a private endpoint is used as it is.  The URL is that of the queue, as it is."""
    sink = queues.sink(f"https://{host}/123456789012/name.fifo")
    queue = sink._queue  # type: ignore[attr-defined]
    assert (sink.name, queue.is_fifo, queue._found) == (
        "sqs://name.fifo",
        True,
        f"https://{host}/123456789012/name.fifo",
    )
    assert queue._session.region_name == region
    client = queue._session.client("sqs", endpoint_url=queue._endpoint)
    assert client.meta.endpoint_url == endpoint
    client.close()
    sink.close()
