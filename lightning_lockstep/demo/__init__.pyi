from lightning_lockstep.demo.images import ConvNet as ConvNet
from lightning_lockstep.demo.images import DigitsData as DigitsData
from lightning_lockstep.demo.text import ByteGPT as ByteGPT
from lightning_lockstep.demo.text import SourceTextData as SourceTextData
