"""A small convolutional network for small grey images."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_lockstep._settings import Faults, is_whole
from lightning_lockstep.demo.classifier import ClassifierModule
from lightning_lockstep.demo.data_module import LABELLED_IMAGES


class ConvNet(ClassifierModule):
    """Three convolutions with group normalisation, then one linear layer.

    Group normalisation keeps no statistics of the batch, so that the network computes the same function of
    the global batch on any number of ranks.

    Args:
        width: Channels of the first convolution; a multiple of 8.
        num_classes: Number of classes.
        in_channels: Channels of an image.
        learning_rate: Step size of AdamW.
        weight_decay: Decoupled weight decay of AdamW, on matrices only.
        warmup_steps: Steps over which the learning rate rises from 0 [optimizer steps].
        global_train_loss: Average `train_loss` over all ranks instead of logging rank 0's own.

    Raises:
        ConfigurationError: A setting is out of range; all faults are listed.

    Ranks:
        See `ClassifierModule`.
    """

    takes = LABELLED_IMAGES

    def __init__(
        self,
        *,
        width: int = 32,
        num_classes: int = 10,
        in_channels: int = 1,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 0,
        global_train_loss: bool = True,
    ) -> None:
        faults = Faults()
        in_groups = is_whole(width) and width > 0 and width % 8 == 0
        faults.check(in_groups, "width", width, "a multiple of 8 (channels in 8 groups)")
        faults.whole("num_classes", num_classes, least=2)
        faults.whole("in_channels", in_channels)
        super().__init__(
            faults,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            global_train_loss=global_train_loss,
        )
        self.save_hyperparameters()
        self.body = nn.Sequential(
            _block(in_channels, width),
            _block(width, 2 * width),
            nn.MaxPool2d(2),
            _block(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )
        self.head = nn.Linear(8 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits `(batch, num_classes)` of images `(batch, in_channels, height, width)`."""
        logits: Tensor = self.head(self.body(images))
        return logits


def _block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False), nn.GroupNorm(8, outputs), nn.GELU()
    )
