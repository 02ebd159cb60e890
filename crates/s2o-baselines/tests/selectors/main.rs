//! Each selector against a plain re-implementation, and what holds for all of them.

mod mean_pooling;
mod pbs;
mod plain;
mod plain_cdf;
mod real;
mod sliding_window;
mod xattention;
