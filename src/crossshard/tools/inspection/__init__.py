"""Inspection: what a compiled program sends, and the least that it has to send.

``crossshard.tools`` exports ``inspect``, the ``Communication`` that it returns and what that holds.
"""
