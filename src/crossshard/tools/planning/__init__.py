"""Planning: which mesh and weight update fit a machine that is not there, and how long they take.

``crossshard.tools`` exports ``plan``, the ``Plan`` that it returns, and what that holds.
"""
