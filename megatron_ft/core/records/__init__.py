"""The records of the event logs, each a frozen dataclass; ``docs/event-log.md`` is made from them.

Users and their scripts build on them. Within one ``SCHEMA`` a record or a field may be added, nothing else changes;
what a reader doesn't know it passes over. A field without a default is one that no reader can do without.

Who writes some imports those, and only readers import all: monitors, of which there is one per rank, are to start fast.
"""

from __future__ import annotations

SCHEMA = 1
