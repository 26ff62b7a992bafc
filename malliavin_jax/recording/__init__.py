"""Recorded runs of a learner that is not ours: checked once, read in parts, held against the law of the learner."""

from .long_log import split_log as split_log
from .recording import Recording as Recording
from .report import Consistency as Consistency, consistency as consistency
from .residuals import LearnerReport as LearnerReport
