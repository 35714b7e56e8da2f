"""What `pgreaper register` says of the application's side, in the words that were typed."""

import pytest

REGISTER = ["register", "p", "holds", "--deadline", "expires_at", "--owner", "me"]
STATES = ["--status", "status", "--held", "held", "--expired", "expired"]


def test_it_is_shown_and_stored(in_process, holds, db):
    """A person sees what consuming and restoring would write; the same call again changes nothing."""
    db.execute("alter table holds add paid_at timestamptz")
    options = ["--consumed", "consumed", "--consumed-stamp", "paid_at", "--restore-within", "15 min"]
    result = in_process(*REGISTER, *STATES, *options)
    assert result.code == 0
    facts = {line.split("  ")[1]: line.split("  ")[-1].strip() for line in result.out.splitlines() if line[:2] == "  "}
    assert facts["consuming sets"] == "status = consumed, paid_at = the time"
    assert facts["restoring"] == "within 15 min, as held"
    assert "nothing to change" in in_process(*REGISTER, *STATES, *options).out
    assert in_process("grant", db.info.user, "--as", "application").code == 0
    assert "--consumed" in in_process("register", "--help").out


def test_two_stamps(in_process, holds, db):
    """Without a status, held means that both are null, for the index too."""
    db.execute("alter table holds add ended_at timestamptz, add paid_at timestamptz")
    result = in_process(*REGISTER, "--stamp", "ended_at", "--consumed-stamp", "paid_at")
    assert "ended_at is null and paid_at is null" in result.out
    assert "(expires_at) where ended_at is null and paid_at is null;" in result.out
    db.execute("create index on holds (expires_at) where ended_at is null and paid_at is null")
    assert "serves" in in_process(*REGISTER, "--stamp", "ended_at", "--consumed-stamp", "paid_at").out


@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (["--consumed-stamp", "paid_at"], "does not say which state they have",
         "Say --consumed …, or leave out --consumed-stamp."),
        (["--held", "kept", "--restore-within", "1h"], "which of its held states",
         "Say --restored held, or another of them."),
        (["--restored", "held"], "restored is of no use", "Give --restore-within … as well, or leave it out."),
        (["--restore-within", "soon"], "--restore-within soon is not an interval", "Write it as Postgres does"),
    ],
)  # fmt: skip
def test_hints_speak_of_options(in_process, holds, db, options, error, hint):
    """Not of the parameters of the function below."""
    db.execute("alter table holds add paid_at timestamptz")
    result = in_process(*REGISTER, *STATES, *options)
    assert (result.code, result.out) == (2, "")
    assert error in result.err
    assert f"hint: {hint}" in result.err
