"""Learned timeouts: what ranks have taken so far, times a factor, and a look before a kill. Pure: no clock, no I/O.

**Rule** (`rule`). A learned timeout is five times (``safety_factor``) the longest interval of any rank in this run,
averaged with the value before, which may come from an earlier run, and never below 1.25 times that interval. An
interval that is open at the time of the calculation counts as observed. A rank is terminated by it after 60 s at the
earliest (``learned_floor``; "setup", of which a run has only one, after four times that), and reported after 5 s.

**Where.** Nothing is learned in the training process: the hooks store words on the board, from which its monitor counts
intervals (`intervals`). At a milestone (a save, a number of steps, the end of the run) it tells its launcher the
longest. Once all ranks have got there, the launcher sends their maxima to the leader, and the leader those of all nodes
to all launchers (`gathering`). Each launcher (`launcher`) applies the rule and arms its monitors; that of place 0 also
writes ``ft_state.json`` (`timeouts`). What is learned at the end of a run applies from the next run on.

**Conditions** are those of Megatron's own modules (`rule.reasons_against`): "setup" only after a persistent checkpoint
was loaded, "step" after 16 iterations, "checkpointing" only from saves that are not asynchronous, the time out of
section only at the end.

**Mode.** With "report", the default, a rank that exceeds a learned timeout is reported, whether the value was learned
now or read from a file. With "on", or where the script asks for it (``calc_ft_timeouts``), it is terminated.

**The last look.** A monitor whose rank exceeds a learned timeout asks its launcher. Evidence is collected on the ranks
of all nodes, none of which gets a signal, and each is observed before and after that (`progress`). If any rank has
moved on, the interval goes on, for a quarter more of its time, up to four times the timeout in all; then the look is
repeated. Otherwise the rank is terminated.

**After a kill** a timeout is doubled if it was wrong in all likelihood: a rank was seen to move before, or the next
cycle ended by the same timeout again. One real hang doubles nothing. The doubled value takes the place of the one
before, in the file, too, and the average of the rule halves its surplus with each calculation.
"""
