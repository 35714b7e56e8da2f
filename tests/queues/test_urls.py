"""Which URL leads to which queue, and that a bad one is refused without being repeated."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pgreaper import queues
from pgreaper.errors import InvalidInput

SECRET = "s3cret"


def test_a_url_is_taken_apart():
    """User and password are decoded, the rest is as it was written."""
    url = queues.parse(f"AMQP://ann%40x:{SECRET}%2F%3A@rabbit:5673/shop?queue=a%20b", "--to")

    assert (url.scheme, url.user, url.password, url.path) == ("amqp", "ann@x", f"{SECRET}/:", "/shop")
    assert (url.endpoint(5672), dict(url.query)) == (("rabbit", 5673), {"queue": "a b"})
    assert queues.parse("amqp://[::1]/", "--to").endpoint(5672) == ("::1", 5672)


@pytest.mark.parametrize(
    ("url", "says", "hint"),
    [
        (f"{SECRET}", "the text of --to is no URL", "--to begins with stdout:, http://"),
        (
            f"foo://u:{SECRET}@host/",
            "begins with foo:, which is no queue that pgreaper knows",
            "--to begins with stdout:, http://",
        ),
        (f"amqq://u:{SECRET}@host/", "begins with amqq:", "Did you mean amqp:?"),
        ("stdin:", "names something to read from", "--to begins with stdout:, http://"),
        (f"amqp://u:{SECRET}@x@host/?queue=q", "has a character that must be escaped", "write @ as %40"),
        (f"amqp://u:{SECRET}/x@host/?queue=q", "has a character that must be escaped", "write @ as %40"),
        (f"amqp://u:{SECRET}?x@host/?queue=q", "has a character that must be escaped", "write @ as %40"),
        (f"amqp://u:{SECRET}#x@host/?queue=q", "has a character that must be escaped", "write @ as %40"),
        (f"amqp://u:{SECRET}/?queue=q", "has a host or a port that is none", "write @ as %40"),
        (f"amqp://u:{SECRET}@/?queue=q", "names no host", "write @ as %40"),
        (f"amqp://u:{SECRET}@h:65536/?queue=q", "has a host or a port that is none", "write @ as %40"),
        (f"amqp://u:{SECRET}@h/", "does not name one place for events", "Give ?queue=NAME"),
        (f"amqp://u:{SECRET}@h/?queue=q&exchange=e", "does not name one place for events", "Give ?queue=NAME"),
        (f"amqp://u:{SECRET}@h/?queue=q&queue=r", "has an option twice", "once"),
        (f"amqp://u:{SECRET}@h/?queu=q", "has an option queu that does not exist", "Did you mean queue?"),
        (f"amqp://u:{SECRET}@h/?queue=q&heartbeat=x", "has heartbeat that is no number", "heartbeat=15"),
        (f"amqp://u:{SECRET}@h/?queue=q&cacertfile=x", "has cacertfile, and amqp: is not encrypted", "amqps://"),
        (f"amqps://u:{SECRET}@h/?queue=q&cacertfile=/none", "cannot be read: FileNotFoundError", "PEM"),
        (f"amqp://u:{SECRET}@h/?exchange=e&routing_key={'k' * 256}", "routing_key that is too long", "255"),
        (f"https://u:{SECRET}@:1/", "has a host or a port that is none", "write @ as %40"),
        (f"https://h/{SECRET * 20_000}", "cannot be asked for anything", "write @ as %40"),
        ("stdout:file", "takes nothing behind the colon", "redirect it in the shell"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url, says, hint):
    """The error names the fact and the remedy, ends with 2, and repeats no password."""
    with pytest.raises(InvalidInput) as refused:
        queues.sink(url)

    assert says in refused.value.message
    assert hint in (refused.value.hint or "")
    assert SECRET not in refused.value.message + (refused.value.hint or "")
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("url", "says", "hint"),
    [
        ("stdout:", "names something to write to", "--from begins with stdin:"),
        ("foo://host/", "begins with foo:", "--from begins with stdin:, amqp://"),
        ("nothing", "is no URL", "--from begins with stdin:, amqp://"),
        ("stdot:", "begins with stdot:", "Did you mean stdin:?"),
        ("https://host/", "names something to write to", "--from begins with stdin:"),
        ("amqp://host/", "names no queue", "Add ?queue=NAME"),
        ("amqp://host/?queue=q&attempts=0", "has attempts that is no number from 1", "attempts=5"),
        ("amqp://host/?queue=q&exchange=e", "has an option exchange that does not exist", "amqp: has queue"),
    ],
)
def test_a_url_that_nothing_comes_from_is_refused(url, says, hint):
    """The same for the other direction."""
    with pytest.raises(InvalidInput) as refused:
        queues.source(url)

    assert says in refused.value.message
    assert hint in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("stdout:", "stdout:"),
        (f"amqp://u:{SECRET}@rabbit/shop?queue=events", "amqp://rabbit/shop?queue=events"),
        (f"amqps://u:{SECRET}@rabbit:1/?exchange=e", "amqps://rabbit:1?exchange=e"),
        (
            f"https://u:{SECRET}@hooks.example.com:8443/services/{SECRET}?token={SECRET}",
            "https://hooks.example.com:8443",
        ),
    ],
)
def test_the_name_of_a_sink_may_be_shown(url, name):
    """No user, no password, and nothing of a webhook's path or options, which are passwords too."""
    sink = queues.sink(url)
    try:
        assert sink.name == name
        assert SECRET not in repr(queues.parse(url, "--to"))
    finally:
        sink.close()


def test_an_aws_queue_url_is_sqs():
    """An https:// URL of SQS is not posted to."""
    for host in (
        "sqs.eu-west-1.amazonaws.com",
        "sqs-fips.us-gov-west-1.amazonaws.com",
        "eu-central-1.queue.amazonaws.com",
        "sqs.cn-north-1.amazonaws.com.cn",
        "vpce-0a1b-2c3d.sqs.eu-west-1.vpce.amazonaws.com",
    ):
        assert queues._way(queues.parse(f"https://{host}/123456789012/q", "--to")).module == "sqs", host
    for host in ("sqs.example.com", "amazonaws.com", "sqs.eu-west-1.amazonaws.com.example.com"):
        assert queues._way(queues.parse(f"https://{host}/123456789012/q", "--to")).module == "http", host


@pytest.mark.parametrize(
    ("url", "library", "extra"),
    [
        ("amqp://h/?queue=q", "aio_pika", "rabbitmq"),
        ("https://h/", "httpx", "http"),
        ("sqs://q", "boto3", "sqs"),
        ("kafka://h/t", "confluent_kafka", "kafka"),
    ],
)
def test_a_missing_extra_is_named(url, library, extra):
    """Without its library a scheme is refused, with the command that installs it."""
    program = (
        "import sys; from pgreaper import queues; from pgreaper.errors import InvalidInput\n"
        f"sys.modules['{library}'] = None\n"
        f"try: queues.sink('{url}')\n"
        "except InvalidInput as error: print(error, error.hint)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert f"needs the extra {extra}, which is not installed: there is no module {library}" in run.stdout
    assert f"pip install 'postgres-reaper[{extra}]'" in run.stdout


def test_nothing_is_imported_that_is_not_used():
    """Whoever writes to a pipe loads no broker's library."""
    program = (
        "import sys; from pgreaper import queues; queues.sink('stdout:'); queues.source('stdin:')\n"
        "print(*{'aio_pika', 'aiormq', 'httpx', 'boto3', 'confluent_kafka'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout == "\n"
