//! Tests of each selector against a plain re-implementation, and of the properties that all selectors share.

mod agreement;
mod flexprefill;
mod mean_pooling;
mod minference;
mod pbs;
mod plain;
mod plain_cdf;
mod real;
mod sliding_window;
mod smollm2;
mod sparge;
mod xattention;
