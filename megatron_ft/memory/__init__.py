"""Memory checkpoints: the training state of each rank in its node's memory, so that a restart redoes next to nothing.

**What is promised.** A snapshot is what `save` was given, at the moment of the call, or there is none. What is restored
has the digests that were computed when it was written. All ranks of a cycle restore the same iteration, or none does.
`save` and `restore` never harm a job that would go on without them: what can't be kept is one line and no snapshot.

**Who does what.**

| folder | is | owns |
|---|---|---|
| `rank/` | code in the training process: `save`, `restore` | nothing that outlives the rank |
| `keeper/` | one process per node, without torch | layouts, digests, what is verified |
| `launcher/` | starts the keeper, replaces it | the keeper's listening socket; a second descriptor of each segment |
| `rules/` | pure decisions | layout, retention, which snapshot to restore |
| `leader/` | the part at the leader: chooses between cycles | nothing: nodes report, the decision carries the choice |

**States.** A *segment* is one memfd with one rank's state of one iteration: written, then sealed, then verified. A
*snapshot* is the set of segments of one iteration, one per rank; it is complete when all are verified. Its key is
(cycle, era, iteration). The era grows whenever `save` is called for a lower iteration than before, so that an
abandoned timeline is never newer than the one that replaced it.

**Writing.** `take_apart` makes a tree of the state, in which tensors are numbers, and the head (MessagePack).
`copy_tensors` copies into a segment allocated before, with a thread per processor; tensors of a device come on a side
stream through page-locked memory of 1 GiB at most. Then `save` returns, and a thread goes on with the segment alone: it
computes digests (XXH3-128), writes head, digests and trailer, unmaps, for what is mapped can't be sealed, and sends
`CommitSegment`. The keeper seals, reads back, compares all digests, and answers.

`save` never waits for its own lock: a call in a signal handler or another thread is skipped. It waits for its thread
for 5 % of the time since the last snapshot, then skips this one; the next is at a multiple of a power of 2, so that
slow and quick ranks have the same ones. A fork of the rank saves nothing.

**Retention.** A rank has three segments: of the last complete snapshot, of newer verified ones, and the one being
written. If only the newest were kept, a rank that is one snapshot ahead would drop what the others are about to
complete. A reservation that doesn't fit into the node's memory and cgroups, with a reserve, is refused in one line.

**Choosing.** A keeper says when all ranks of its node are verified (`Saved`); when all places have said so, the leader
answers `Settled`, and older ones go. Between cycles each node tells its stock, and a leader that takes over learns all
from there. `choose` returns the newest key of which each rank of the new cycle has a verified segment within reach;
the decision carries it. A cycle that restored and failed before a new iteration restores the same key once more; then
the snapshot is bad, and the next cycle goes on from the file. Losses of nodes and requests of users don't count.

**Deaths.** A rank's death costs nothing: the keeper has its segments, and watches its pidfd. If the keeper dies, the
launcher hands the descriptors to the next one, which trusts nothing and checks sizes, seals, layouts and digests again.
If the launcher dies, all is gone but copies on other nodes, and files.

**Copies** go from keeper to keeper, only with FT_SECRET: all ranks of the node verified, copied, verified there,
`Saved`, `Settled`. So a complete snapshot outlives any one node. **Files** are written at the end of a life, by
launchers from their descriptors, for ``--ft-memory-checkpoint-dir``. A set is whole if its names cover all ranks.

**What is believed, and why.**

| bytes | believed because |
|---|---|
| segment, from the rank that writes it | same uid, made by this keeper, sealed, digests compared |
| segment, after a keeper's replacement | size, seals and digests are checked again |
| layout | own digest; shapes and dtypes are checked against the size, and offsets follow |
| copy, from another node | MACs under a key made from FT_SECRET; digests compared by the receiver |
| message to the keeper | peer uid, limited lengths, strict codec; any process of the user can claim a rank |
| values that aren't tensors | MessagePack, checked in full; of objects, a pickle under the job's MAC |
"""
