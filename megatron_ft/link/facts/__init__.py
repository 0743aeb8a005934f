"""Records of the event logs, each a frozen dataclass; ``docs/event-log.md`` is generated from them.

Users' scripts read them. Within one ``SCHEMA`` a record or a field may be added, nothing else changes; readers skip
unknown ones. A field without a default is needed by every reader.

A process imports only the records that it writes, and readers import all: monitors, one per rank, must start fast.
"""

from __future__ import annotations

SCHEMA = 4
