"""One job over several nodes: its lock, its leader, and the decisions that all launchers follow.

**What is promised.** No two leaders decide the same number, whatever each of them believes. A decision that any
launcher has heard of is never forgotten while the lock's holder or etcd lives. A healthy job isn't ended or restarted
because its leader, or the network between launchers, was away for a while. A job that has finished is reported as
finished, by every launcher. Nothing that is unauthenticated is decoded beyond its first bytes.

**One leader, because there is one lock**: the port of the endpoint, or a key in etcd. The leader decides which nodes
train in a cycle, at which places, and whether another cycle follows. Launchers vote on nothing, and elect nobody.

- *Endpoint.* The launcher that gets the port holds it for the job's life. It starts the leader's process on that
  socket, keeps the record of its decisions, and hands it to the next process if that one dies. If the host is lost,
  the launchers look for the endpoint again until the join timeout, or exit where a scheduler starts them again.
- *etcd.* Any launcher may lead, spares included. The launcher that puts its address into the leader's key, on a lease
  of some seconds, starts the process, which renews the lease: a leader that hangs or is paused loses the lock. The
  revision at which the key was created is the epoch: launchers obey the highest that they have seen.
- *One node.* The leader is an object in the launcher, behind the same messages.

**Decisions** are numbered: `start` of a cycle, or `end` of the job. A decision is durable before any launcher hears of
it, with the lock's holder or in etcd. There the last one is a key that one transaction swaps: the key is as this leader
knows it, and the leader's key still of this epoch. All else a new leader learns from hellos, which carry place, last
decision, last report, outcome and verdict; it waits for them before it decides.

**A job, at its leader**::

    no record --MAX fresh launchers, or 8 s--> meeting --MIN ready, last call--> cycle n
                                                  ^                                |
                                                  '-- restart --- judging <--------'  ranks ended, or a node is lost
                                                                     |
                                                                     '--> the end: told until all have left (60 s)

A leader with a record goes on where the record says. One without a record can't know whether the job has begun: it
takes over the newest decision that any hello carries. A launcher is sent its own place only. A decision names only
launchers that have answered since the round was complete: one that died right after `ready` costs no restart.

**Loss** needs two things: the launcher is silent, and the others' collectives stand still, as the age of the last
progress in each beat tells. While all others progress, nobody is lost, for the silent one takes part. A launcher that
is cut off judges itself by the same rule. Where nothing tells progress, a plain timeout decides.

**An earlier run of the same name** (--rdzv-id) leaves its last decision in etcd. The first one of another run takes its
place, once MIN new launchers have come and none of the earlier run has for a while.

**Where things are.** `rules/` has the machines of the leader (`Coordinator`) and of a launcher (`Member`), without I/O;
`service` puts the leader on sockets, `coordination` the member. `parts` lists the capabilities that attach to a leader:
hangs, memory checkpoints, learning, slow ranks. The rest of the leader knows none of them. Each rule with the execution
that needs it is in docs/design/control-plane.md; `tests/simulation` runs both machines through thousands of jobs.
"""
