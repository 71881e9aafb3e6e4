"""Exactly the blobs that a restart and a revert need are kept."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midstream.change.configuration import FIRST_REVISION
from midstream.change.revert import reachable_revisions
from midstream.checkpoint.change_records import ChangeRecord, Outcome, UpdateRecord
from midstream.checkpoint.retention import blobs_on_record
from midstream.ids import Digest, Revision

OPERATORS = ["A", "B", "C"]
KEPT = 3


def history(
    draws: list[tuple[Outcome, frozenset[str], bool]],
) -> tuple[list[ChangeRecord], dict[int, dict[str, Digest]], set[Digest]]:
    """Records; the functions that ran at each revision; and all applied migrations."""
    runs = {name: Digest(f"{name}0") for name in OPERATORS}
    at = {int(FIRST_REVISION): dict(runs)}
    records, migrations = [], set()
    for number, (outcome, operators, migrates) in enumerate(draws, 1):
        revision = Revision(number + 1)
        updates = tuple(
            UpdateRecord(
                name,
                "f",
                Digest(f"{name}{number}"),
                "",
                runs[name],
                migrate=Digest(f"{name}{number}m") if migrates else None,
            )
            for name in sorted(operators)
        )
        records.append(ChangeRecord(number, revision, 0.0, "ann", "fries", updates, "", outcome))
        if outcome is Outcome.APPLIED:
            runs.update({update.operator: update.function for update in updates})
            at[revision] = dict(runs)
            migrations |= {update.migrate for update in updates if update.migrate is not None}
    return records, at, migrations


draws = st.lists(
    st.tuples(
        st.sampled_from([Outcome.APPLIED, Outcome.APPLIED, Outcome.ROLLED_BACK, Outcome.REFUSED]),
        st.frozensets(st.sampled_from(OPERATORS), min_size=1),
        st.booleans(),
    ),
    max_size=12,
)


@given(draws)
def test_exactly_the_blobs_for_restart_and_revert_are_kept(drawn):
    records, at, migrations = history(drawn)
    live = blobs_on_record(records, KEPT)
    newest = at[max(at)]
    changed = {name for name in OPERATORS if newest[name] != f"{name}0"}
    assert {newest[name] for name in changed} <= live, "a restart runs them"
    assert migrations <= live, "keys may be at old levels"
    wanted = {newest[name] for name in changed} | migrations
    for revision in sorted(at)[-KEPT - 1 :]:
        wanted |= {at[revision][name] for name in OPERATORS if at[revision][name] != newest[name]}
    assert wanted <= live, "the job can go back that far"
    # Functions between two revisions that can be reverted to are needed by one of them.
    assert live <= {digest for runs in at.values() for digest in runs.values()} | migrations
    assert len(live - migrations) <= len(OPERATORS) * (KEPT + 2)


@given(draws)
def test_revisions_can_be_reverted_to_if_their_functions_are_stored(drawn):
    records, at, _ = history(drawn)
    stored = blobs_on_record(records, KEPT) | set(at[max(at)].values())
    found = list(reachable_revisions(records, stored.__contains__))
    assert found == [revision for revision in sorted(at) if set(at[revision].values()) <= stored]
    assert set(sorted(at)[-KEPT - 1 :]) <= set(found)


def test_a_pending_change_keeps_its_functions_and_what_it_would_replace():
    records, _, _ = history([(Outcome.PENDING, frozenset({"A"}), True)])
    assert blobs_on_record(records, KEPT) == {"A1", "A0", "A1m"}


@pytest.mark.parametrize("outcome", [Outcome.REFUSED, Outcome.ROLLED_BACK])
def test_a_change_that_was_not_applied_keeps_no_blobs(outcome: Outcome):
    records, _, _ = history([(outcome, frozenset({"A"}), True)])
    assert blobs_on_record(records, KEPT) == frozenset()


def test_revisions_before_a_return_to_the_script_cannot_be_reverted_to(tmp_path: Path):
    records, at, _ = history([(Outcome.APPLIED, frozenset({"A"}), False)])
    dropped = ChangeRecord(2, Revision(3), 0.0, "ann", "epoch", (), "", Outcome.APPLIED, drops=True)
    stored = {digest for runs in at.values() for digest in runs.values()}
    assert list(reachable_revisions([*records, dropped], stored.__contains__)) == [3]
