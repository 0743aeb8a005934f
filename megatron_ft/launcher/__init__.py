"""``ft_launcher``: one per node. It starts the ranks of each cycle, watches them, ends them, and says what happened.

**What is promised.** A rank gets what torchrun gives it: variables, streams, working directory, signals. Ranks of a
cycle start together and end together: none that SIGKILL can end is left when the launcher tells its node's end, and
none outlives the launcher. Each of them ends for a reason that was observed, and the printed line says this reason. A
request to stop is obeyed in every state; a second one is obeyed at once. The exit code is the job's, unless this
launcher is stopped or can't go on.

**Machine and effects.** `rules/` decides. `Agent.handle(event, now_ns, seen)` takes one event, the time, and how the
ranks look at that moment, and returns effects in order; it reads no clock, file or process. `cycle/` turns what
happens into events, one at a time, and carries out the effects. So whole jobs run in virtual time
(`tests/simulation`), with the machine that runs in production. What the leader decides (`Assignment`, `Verdict`,
`Dismiss`) are events like any other.

**Phases** (`rules/agent.py` has the table; a phase that it doesn't list after another is an error in tests)::

    .-> JOINING --> CHECKING <--> ASIDE
    |      |            |
    |      '------------+--> READY --> STARTING --> RUNNING --> ENDING --> TERMINATING --> JUDGING --.
    |                                                                                                |
    +---------------------------------- another cycle follows ---------------------------------------+
    |                                                                                                |
    '----- a leader that hadn't heard of the end ---------- DONE <-----------------------------------'
                                                              |
                 LEAVING (goodbye was said) ----------------> OVER
                    |                                          ^
                    '--> EXCLUDED (the others go on) ----------'

JOINING, CHECKING, ASIDE and READY have no ranks. The node is ready once its health command has passed; a node that is
unfit stays aside, and is checked again. With its `Assignment` the node knows its place, the world and the ranks'
store, and the ranks start. A cycle whose nodes can't meet, or which is over before its ranks start, runs with no
ranks, for the leader has to hear of its end. A start that is given up because of a request to stop leads back to
JOINING.

RUNNING ends when a rank fails, when all have succeeded, at a signal, at a request of a rank, when the leader tells of
a later cycle, or when this launcher was cut off for too long. TERMINATING ends when nothing of the ranks is left.
JUDGING ends with the leader's `Verdict`, or when it is known that none will come.

LEAVING: the node has said goodbye, and waits for an answer for 1 s; an excluded node for 30 s, the holder of the
endpoint for 60 s. EXCLUDED: its ranks asked for its exclusion, or can't be killed. The launcher waits for the end of
the job, to exit with the job's code. A launcher on standby ends as those do whose ranks end with 0.

**Time for ranks to end** (ENDING), before what is left is terminated:

| why the cycle ends here | waits for | at most | then |
|---|---|---|---|
| a rank has failed | ranks found hung | 6 s | terminated |
| the same, and ranks end by themselves | all | ``--workers-stop-timeout`` | terminated |
| the launcher was asked to stop | all, and forwards each signal to them | ``--term-timeout`` | killed |
| a rank asked for the end, or to exclude the node | that rank | ``--workers-stop-timeout`` | terminated |
| the job has succeeded elsewhere | all | ``--workers-stop-timeout`` | cleared away |
| other nodes join or are lost | none | | terminated |
| the launcher can't go on here | none | | terminated; the node is lost at once |

A hung rank is terminated by its monitor, with the user's signal and after evidence was collected, unless the launcher
is asked to stop. After a failure the other ranks have ``--workers-stop-timeout``; if it isn't set and another cycle
follows, 0.1 s: nothing that they could still do would be kept.

**Parts.** The machine names no capability. Hang detection, slow ranks, learned timeouts and memory checkpoints are
parts (`link.base.launcher_part`), listed in `cycle/parts.py`. Messages and events go to the parts whose `HEARS` names
their type, and reports of monitors go to all. A part hears of the beginning of a cycle, of the creation of its ranks,
of each failure, and of its end before the first signal. It fills its fields of `Ready`, and may hold the node's
report while it finds out why ranks fail.

**Processes.** The launcher starts monitors, the keeper and the leader by argv, as fresh interpreters: a fork of a
process that has threads and torch may deadlock. Only the fork server's ranks are forks, of a process made for that.
The launcher is child subreaper: what a rank leaves behind becomes its child, and is ended with the cycle if it is
still in the rank's group or session. It knows processes by pidfd, and signals process groups only while their leader
isn't reaped. If the launcher dies, ranks die of their parent-death signal, and monitors end what these have started.
Above it stands torch's elastic agent (`torch_compat/`), from which events, error files, log specifications and NUMA
binding come; its loop is replaced by the machine.
"""
