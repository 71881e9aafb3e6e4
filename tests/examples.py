"""Which examples Hypothesis tries: the same few in every run of ``make test``, many new ones in ``make simulate``.

``make test`` must give the same verdict in every clone. Its profile derives the examples of a property from the
property itself, and keeps no database of examples that failed. The other profile searches for new ones.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.internal.conjecture import providers

REPEATABLE = "repeatable"
SEARCHING = "searching"
SEARCH_FACTOR = 20
"""How many times as many examples a search tries."""


def register_profiles() -> None:
    """Register both profiles and load that of ``make test``. ``pytest --hypothesis-profile=searching`` loads the other.

    ``tests/conftest.py`` calls this before any test module is imported, because settings take their defaults from the
    profile when they are made.
    """
    # Deadlines and health checks go by the clock, and a busy machine is no fault of what is tested.
    patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    settings.register_profile(REPEATABLE, patient, derandomize=True, database=None)
    settings.register_profile(
        SEARCHING,
        patient,
        max_examples=SEARCH_FACTOR * patient.max_examples,
        derandomize=False,
        database=DirectoryBasedExampleDatabase(".hypothesis/examples"),
    )
    settings.load_profile(REPEATABLE)
    _ignore_loaded_modules()


def examples(count: int, **more: Any) -> settings:
    """Settings of a property that tries ``count`` examples, and :data:`SEARCH_FACTOR` times as many in a search.

    Use it in place of Hypothesis's ``settings``, which would fix the number for both profiles.
    """
    return settings(max_examples=count * (SEARCH_FACTOR if _is_search() else 1), **more)


def _is_search() -> bool:
    return settings.get_current_profile_name() == SEARCHING


def _ignore_loaded_modules() -> None:
    """Keep repeatable examples independent of what was imported before.

    Hypothesis mixes constants of all loaded modules into its examples, even if they are derandomised. Which modules are
    loaded depends on the tests that ran before in the same process, and so, with several processes, on timing. There is
    no setting for it.
    """
    gather = providers._get_local_constants
    nothing = type(providers._local_constants)()
    providers._get_local_constants = lambda: gather() if _is_search() else nothing
