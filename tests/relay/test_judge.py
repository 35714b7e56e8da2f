"""Whose fault a refusal is, and what an event looks like."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from uuid import UUID

import pytest

from pgreaper.handlers import idempotency_key
from pgreaper.queues import Refusal, Sent
from pgreaper.records import RelayEvent
from pgreaper.relay import SAME, Judge, Verdict, message

NOON = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
FOR_GOOD = Refusal("TooLarge", transient=False)
FOR_NOW = Refusal("HTTP 503", transient=True, retry_after=7.0)


def event(key: str = "7", deadline: datetime = NOON, payload: str | None = None) -> RelayEvent:
    return RelayEvent(UUID(int=1), "5.1", key, deadline, NOON, "expired", 1, NOON, payload)


def all_refused(n: int, refusal: Refusal) -> Sent:
    return Sent(frozenset(), dict.fromkeys(range(n), refusal))


def test_an_event():
    """Its fields and how they are written; the idempotency key is the one that a handler gets for the same hold."""
    sent = message("holds", event(), payload=False)
    assert sent.identity == idempotency_key("holds", "7", NOON) == "holds/7/2026-01-31T12:00:00.000000Z"
    assert (sent.key, sent.headers) == ("7", {"content-type": "application/json", "policy": "holds"})
    assert json.loads(sent.body) == {
        "policy": "holds", "key": "7", "deadline": "2026-01-31T12:00:00.000000Z",
        "expired_at": "2026-01-31T12:00:00.000000Z", "state": "expired", "idempotency_key": sent.identity,
    }  # fmt: skip


@pytest.mark.parametrize("key", ["", "ä/€ \U0001f600", '"\\', "a\nb\x7f", '["1", "x"]', "k" * 5000])
def test_an_event_of_any_key(key):
    """Whatever a key is made of, the body is JSON in UTF-8 and has it unchanged."""
    assert json.loads(message("holds", event(key), payload=False).body)["key"] == key


def test_a_payload_is_passed_on_as_the_server_wrote_it():
    """A number keeps its digits; a row that has gone is null, and without columns there is no payload."""
    body = message("holds", event(payload='{"amount": 12345678901234567890.123456789}'), payload=True).body
    assert body.endswith(b'"payload":{"amount": 12345678901234567890.123456789}}')
    assert json.loads(message("holds", event(), payload=True).body)["payload"] is None
    assert "payload" not in json.loads(message("holds", event(), payload=False).body)


def test_a_queue_that_takes_others_refuses_an_event_of_its_own():
    """Each refusal is told to the database, with no word of trouble."""
    verdict = Judge().judge(Sent(frozenset({0, 2}), {1: FOR_GOOD, 3: FOR_NOW}), 4)
    assert verdict == Verdict(frozenset({0, 2}), {1: FOR_GOOD, 3: FOR_NOW})


def test_trouble_charges_nobody_that_it_did_not_answer():
    """What is neither confirmed nor refused goes back; a queue that forgot some without a word has trouble too."""
    verdict = Judge().judge(Sent(frozenset({0}), {}, "ConnectionLost"), 3)
    assert verdict == Verdict(frozenset({0}), {}, "ConnectionLost")
    assert Judge().judge(Sent(frozenset({0}), {}), 3).trouble == "Unconfirmed"


def test_a_queue_that_takes_nothing_for_now_is_to_blame():
    """No event of a batch is charged, however often; the queue is left alone for as long as it asks."""
    judge = Judge()
    for _ in range(30):
        verdict = judge.judge(all_refused(3, FOR_NOW), 3)
        assert (dict(verdict.refused), verdict.trouble, verdict.retry_after) == ({}, "HTTP 503", 7.0)


def test_a_lonely_event_is_charged_until_that_looks_like_the_queue():
    """Twice; then nobody knows, and a success elsewhere begins anew."""
    judge = Judge()
    charged = [bool(judge.judge(all_refused(1, FOR_NOW), 1).refused) for _ in range(5)]
    assert charged == [True, True, False, False, False]
    judge.judge(Sent(frozenset({0}), {}), 1)
    assert judge.judge(all_refused(1, FOR_NOW), 1).refused


def test_a_wrong_address_does_not_cost_every_event():
    """Refused for good, one after the other: the first few are given up, then one a batch, and the queue is named."""
    judge = Judge()
    verdicts = [judge.judge(all_refused(50, FOR_GOOD), 50) for _ in range(4)]
    assert [len(verdict.refused) for verdict in verdicts] == [SAME, 1, 1, 1]
    assert {verdict.trouble for verdict in verdicts} == {"TooLarge"}


def test_events_that_are_refused_for_good_one_by_one_are_given_up():
    """A quiet relay with some bad events gets rid of each."""
    judge = Judge()
    verdicts = [judge.judge(all_refused(1, FOR_GOOD), 1) for _ in range(3 * SAME)]
    assert all(len(verdict.refused) == 1 for verdict in verdicts)


def test_a_queue_may_not_ask_for_days():
    """A rest of at most an hour, whatever the answer says."""
    judge = Judge()
    assert judge.judge(all_refused(2, Refusal("HTTP 429", transient=True, retry_after=86400.0)), 2).retry_after == 3600
