"""Ctrl-C where the main thread handles it, and where it cannot."""

from __future__ import annotations

import sys
import textwrap

from tests.helpers import run_script


def test_ctrl_c_ends_a_main_thread_that_no_handler_reaches() -> None:
    """The main thread sits in C, as in a collective: Python cannot run its handler, the watch can act."""
    code = """
        import ctypes, os, signal, threading, time
        from lightning_lockstep.launchers.subprocess_script import watch_interrupts

        def stuck():
            print("ended by the watch", flush=True)
            os._exit(130)

        watch_interrupts(stuck, patience=0.5)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        libc = ctypes.CDLL(None)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        while True:
            lock = ctypes.create_string_buffer(64)
            libc.pthread_mutex_init(lock, None)
            libc.pthread_mutex_lock(lock)
            libc.pthread_mutex_lock(lock)  # never returns, whatever signal comes
    """
    outcome = run_script([sys.executable, "-c", textwrap.dedent(code)], timeout=180)
    assert not outcome.timed_out
    assert outcome.returncode == 130
    assert "ended by the watch" in outcome.stdout


def test_an_interrupt_that_python_handles_is_left_alone() -> None:
    code = """
        import os, signal, time
        from lightning_lockstep.launchers.subprocess_script import watch_interrupts

        end = watch_interrupts(lambda: os._exit(9), patience=0.3)
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(5)
            except KeyboardInterrupt:
                time.sleep(0.6)  # the program goes on, for longer than the patience
        end()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        print("handled")
    """
    outcome = run_script([sys.executable, "-c", textwrap.dedent(code)], timeout=180)
    assert (outcome.returncode, outcome.stdout.strip()) == (0, "handled")
