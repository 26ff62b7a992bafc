"""Models of the loss fitted to the samples, the residuals they leave, and localizers chosen for these."""

from .selection import short_localizer as short_localizer
