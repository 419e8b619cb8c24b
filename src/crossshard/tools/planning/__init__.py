"""Planning: which mesh and weight update fit a machine that is not there, and what they send.

``crossshard.tools`` exports ``plan``, the ``Plan`` that it returns, and what that holds.
"""
