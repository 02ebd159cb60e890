//! Each selector against a plain re-implementation, and what holds for all of them.

mod agreement;
mod flexprefill;
mod minference;
mod plain;
mod sliding_window;
mod smollm2;
mod sparge;
