"""Diagnosis: what looks wrong with this machine and with JAX on it, before a run.

``crossshard.doctor`` returns a ``Diagnosis``, whose fields have the other types here.
"""

from crossshard.diagnosis.doctor import doctor
from crossshard.diagnosis.report import CollectiveTest, Devices, Diagnosis, Finding

__all__ = ["CollectiveTest", "Devices", "Diagnosis", "Finding", "doctor"]
