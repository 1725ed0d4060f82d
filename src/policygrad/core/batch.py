from policygrad.core.types import *  # shim
