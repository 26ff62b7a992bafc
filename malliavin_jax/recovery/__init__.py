"""The loss, recovered: from the positions of the chain, or by integrating the gradient field."""

from .density import loss_from_samples as loss_from_samples
from .integration import loss_from_estimates as loss_from_estimates, loss_from_field as loss_from_field
from .loss import Loss as Loss
