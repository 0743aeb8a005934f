"""The rank monitor: one process per rank, without torch, that notices a hang, collects evidence, and ends the rank.

**What is promised.** A rank that is overdue in a section, between sections, or between heartbeats is noticed within
its timeout and some 10 ms, whatever the rank does: it may hold the GIL, spin in a kernel, or be stopped. Evidence is
collected before the first signal, for 2 s at most. A rank is never ended for time in which its whole node stood
still, never by a learned timeout that nobody asked to enforce, and never while detection is paused. What can't be
read isn't judged.

**The board.** The monitor and its rank share a page of memory, the board (`link.board`). The hooks of the rank write
to it, without system call, lock or message: which sections are open and since when, the iteration, the last
heartbeat. The monitor reads it. Nothing of the monitor's can delay the rank; nothing in the rank has to answer for a
hang to be seen. The board is written in an order in which a reader finds it consistent, or notices that it isn't, and
looks again. A damaged board is reported in one line, and the rank isn't judged any more.

**What is timed** (`link.base.intervals`). A rank has one running interval for each open section, one for the time out
of sections if none is open, and one for heartbeats. Each has the timeout that was configured, or learned, or none.
The time to the first heartbeat of a cycle has one of its own.

**From an interval to a verdict** (`rules/hang_detector.py`)::

    WATCH --overdue--> CONFIRM --still overdue, 10 ms later--> verdict --> END_RANK
      ^                   |                                       |
      '--- it moved on ---'                                       '--> REST (reported only)

The monitor sleeps until the next interval may be overdue. A late second reading counts as a first one: then the node
itself was busy or stopped. Such time shows in two ways only: the monitor wakes later than it asked, or it gets
SIGCONT. After SIGCONT all of the gap is taken off every interval; after a late wake-up the lateness, and at most a
quarter of the timeout or 10 s more, for a busy node must hide no hang.

A verdict by a timeout that the user configured is final, but under min-healthy, where a rank that only waits for
others goes on. A learned one asks first: all ranks of the job are observed twice, and if any of them has moved on,
the interval is extended, to four times the timeout at most (`last_look.py`). Under ``--ft-observe-only``, and for a
timeout that only reports, the launcher prints a line, and the rank runs on.

**Evidence** (`collect_evidence.py`). First comes a question that a thread of the rank answers: its collectives, the
exception that it handles. Then a real-time signal makes faulthandler write the stacks of all threads, in C, into
memory that the monitor reads. /proc tells the state of its threads, and
whether a process of its own is lost. Each source has a bound, and one that doesn't answer is named as such. A rank
that may run on gets the question only: a signal may wake it. The monitors of the other ranks do the same when the
launcher asks, so that `diagnosis` can compare ranks.

**The end of a rank** (`service.py`). The user's signal goes to the rank's main thread, where Python runs
handlers, and SIGCONT after it, for a stopped process handles nothing; SIGKILL follows after a grace. What else its
group and session hold is the launcher's to end. If the launcher is dead, the monitor ends it: by process group, by
session, and by the path of its own socket in the environment of what has left both (`end_of_rank.py`).

**Deaths.** The death of its launcher ends a rank, by the kernel's parent-death signal. If a monitor dies, the
launcher starts another one and hands it the rank's descriptors (board, pidfd, memory for stacks): no interval is
lost, for the board has its beginning. If the rank dies, the monitor tells how far it had got, and waits for the rank
of the next cycle, which finds it at the same socket. So a restart doesn't wait for a monitor to start.

**Reports** (`reports.py`). Each minute the monitor sends a row: iterations and when each began, sections with count,
sum, longest and a histogram. Section events are no messages: a job of 0.1 s steps costs its monitor nothing while it
is healthy. The first iteration of a cycle is told at once, because a restart is over when all ranks have begun it.
"""
