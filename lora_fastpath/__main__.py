import sys

from lora_fastpath.cli import main

sys.exit(main())
