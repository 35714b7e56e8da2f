"""The doctor tells what is wrong with pg_cron's jobs, and its remedies are to be run where pg_cron lives."""

from __future__ import annotations


def codes(result):
    return {f["code"]: f for f in result.json["findings"] if f["code"].startswith("cron-")}


def test_c083_a_job_that_points_nowhere(cron, shop, pgreaper):
    """Another database than the one where the job is kept: the finding names it, and the remedy heals there."""
    database = cron.new_database()
    shop(cron, database)
    assert pgreaper(cron, database, "cron", "enable").code == 0
    assert [
        f["level"] for f in codes(pgreaper(cron, database, "doctor", "--json")).values() if f["level"] != "note"
    ] == []
    cron.run("update cron.job set nodeport = 1")
    finding = codes(pgreaper(cron, database, "doctor", "--json"))["cron-job-address"]
    assert finding["level"] == "error"
    assert finding["database"] == "postgres"
    result = pgreaper(cron, database, "doctor")
    assert result.code == 3
    assert "in database postgres:" in result.out
    for statement in finding["sql"]:
        assert f"      {statement}" in result.out.splitlines()
        cron.run(statement, database=finding["database"])
    for command in finding["commands"]:
        assert pgreaper(cron, database, *command.split()[1:]).code == 0
    assert "cron-job-address" not in codes(pgreaper(cron, database, "doctor", "--json"))
