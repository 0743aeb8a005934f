"""The launcher's side of hang detection: parts of its machine. Pure.

`Deadlines`: ranks that no monitor judges, before they have begun their monitoring and after its end. `LastLook`: a
timeout is over, and ranks of all nodes are examined before one is terminated. `CollectiveWatch`: no collective
completes on any rank of this node. `HangsOnNode`: a rank was found hung; evidence on all ranks is collected, within a
bound, and sent to the leader, which finds the cause. `SlowRanksOnNode`: how much ranks wait for others.
"""
