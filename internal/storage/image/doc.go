// Package image turns images into the form that sandboxes start from: a
// read-only, uncompressed EROFS file that any number of guests share, and the
// configuration that came with it. It pulls images from registries, imports them
// from archives, builds them of Debian packages, and keeps them in a Store:
//
//	<folder>/lock                 held for moments: names, commits, collection
//	<folder>/names.json           published names, each of one image
//	<folder>/rights.json          images that are published, and names of namespaces
//	<folder>/roots/<hex>/         an image, by its digest; never changed
//	    image.json                its description (Image), locked by running users of it
//	    root.erofs                the root filesystem
//	    plain.erofs               the same without extended attributes, if it has any
//	<folder>/held/<hex>/<holder>  marks of objects that use an image across restarts
//	<folder>/making/<hex>….lock   held by the process that pulls this image from one repository, or builds it
//	<folder>/work/<random>/       images in the making, locked by their makers
//
// An image appears in roots whole or not at all. Folders that a killed process leaves in
// work have no lock any more, and the next maker of an image removes them.
package image
