//! Tests of each selector against a plain re-implementation, and of the properties that all selectors share.

mod delta;
mod flashprefill;
mod flexprefill;
mod inputs;
mod mean_pooling;
mod minference;
mod options;
mod pbs;
mod plain;
mod sliding_window;
mod sparge;
mod vectors;
mod xattention;
