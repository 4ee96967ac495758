"""The doors to what other packages keep private: each name once, with its reason.

``python -m lightning_lockstep._doors`` prints all of them. A test looks each up in the installed release, so that one
which moves a name fails there and nowhere else.
"""
