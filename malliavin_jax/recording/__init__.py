"""Recorded runs of a learner that is not ours: checked once, read in parts, held against the law of the learner."""

from ..checking.report import Consistency as Consistency, checked as checked, consistency as consistency
from ..checking.residuals import LearnerReport as LearnerReport
from .long_log import split_log as split_log
from .recording import Recording as Recording
