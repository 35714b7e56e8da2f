"""
Which kind of role may run which statement of ours: what a refused one should be granted.

Names for each public function the least kind that may call it; the views and tables are a reader's.  What each kind
gets is said in SQL, in ``pgreaper._rights()``, which a refused role may be unable to ask; a test holds the two
together.  Imports nothing of pgreaper.
"""

import re
from typing import Final

# The more a kind may, the later; a role that has the later one needs none before it.
LEAST: Final = {
    "reaper_version": "reader", "reaper_history": "reader",
    "reaper_preview": "worker", "reaper_claim": "worker", "reaper_claim_batch": "worker",
    "reaper_expire": "worker", "reaper_expire_batch": "worker", "reaper_fail": "worker",
    "reaper_renew": "worker", "reaper_release": "worker", "reaper_sweep": "worker", "reaper_next_due": "worker",
    "reaper_expire_keys": "worker",
    "reaper_relay": "worker", "reaper_fetch": "worker", "reaper_ack": "worker", "reaper_keep": "worker",
    "reaper_resend": "operator", "reaper_unrelay": "operator",
    "reaper_replay": "operator", "reaper_discard": "operator", "reaper_pause": "operator",
    "reaper_resume": "operator", "reaper_prune": "operator", "reaper_verify": "operator",
    "pgreaper.grants": "operator",
    "reaper_register": "registrar", "reaper_unregister": "registrar",
    "reaper_consume": "application", "reaper_extend": "application", "reaper_restore": "application",
}  # fmt: skip
"""The kinds by function, and by the one table that readers do not see; granting and revoking is no kind's."""
OWNERS: Final = frozenset({"reaper_grant", "reaper_revoke"})


def needed(statement: str) -> str | None:
    """The kind of role that a statement of ours needs; None: only the owner of pgreaper should run it."""
    called = re.findall(r"\b(?:reaper_\w+|pgreaper\.grants\b)", statement)
    if OWNERS.intersection(called):
        return None
    kinds = {LEAST[function] for function in called if function in LEAST}
    return next((kind for kind in ("application", "registrar", "operator", "worker") if kind in kinds), "reader")
