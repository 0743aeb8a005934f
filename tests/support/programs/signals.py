"""Handles signals, sets a timer, and forks, having asked to be told of forks."""

import os
import signal
import sys

signal.signal(signal.SIGUSR1, lambda number, _frame: print("got", number))
signal.signal(signal.SIGALRM, lambda number, _frame: print("alarm", number))
os.register_at_fork(before=lambda: print("before a fork"), after_in_child=lambda: print("in a child"))
print(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2, signal.SIGINT]))
rank = os.environ["RANK"]
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT))
os.kill(os.getpid(), signal.SIGUSR1)
signal.setitimer(signal.ITIMER_REAL, 0.01)
signal.pause()
pid = os.fork()
if pid == 0:
    os._exit(0)
os.waitpid(pid, 0)
sys.exit(3)
