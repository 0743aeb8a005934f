"""One job over several nodes: its lock, its leader, and the decisions that all launchers follow.

There is one leader, because there is one lock: the port of the endpoint, or a key in etcd. The leader decides which
nodes train in a cycle, at which places, and whether another cycle follows. A decision is durable before any launcher
hears of it; all else a new leader learns from hellos. `rules/` has the machines of the leader (`Coordinator`) and of a
launcher (`Member`), without I/O; `service` puts the leader on sockets. `parts` lists the capabilities that attach to a
leader: hangs, memory checkpoints, learning, slow ranks. The rest of the leader knows none of them.

In etcd any launcher may lead. The launcher that puts its address into the leader's key, on a lease of some seconds,
starts the leader's process; the process renews the lease, so that a leader that hangs or is paused loses the lock.
The revision at which the key was created is the leader's epoch: launchers obey the highest that they have seen.

A decision is a key of its own, written in one transaction: this key is absent, and the leader's key is still of this
epoch. So no two leaders decide the same number, whatever each of them believes. A name of a job (--rdzv-id) that is
used again finds the decisions of an earlier run: each run has a life, whose name is part of the keys. Only the leader
begins another life, once MIN new launchers have come and none of the earlier run has for a while.
"""
