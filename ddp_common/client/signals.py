"""What a person or a batch system has asked of this program by a signal.

Flags, which a launch looks at twice a second: Python swallows an exception that a signal's handler
raises in a callback of an import or of the garbage collector.
"""

stop_requested = False  # by SIGTERM: the ranks shall save and leave
interrupted = False  # by Ctrl-C

attempts_running = 0  # whom it concerns; none: a handler of SIGTERM ends the program itself
